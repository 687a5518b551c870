import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path

import pytest

import kvstore

PACKAGE = Path(kvstore.__file__).parent
MODULES = {
    ".".join(("kvstore", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# The house from the ground up: a module imports from above its own line only.
ORDER = [
    "kvstore.__about__",
    "kvstore.errors",
    "kvstore.records",
    "kvstore.releases",
    "kvstore.layout",
    "kvstore.config",
    "kvstore.paths",
    "kvstore.codecs",
    "kvstore.arrays",
    "kvstore.packing",
    "kvstore.conversion",
    "kvstore.urls",
    "kvstore.storage_options",
    "kvstore.s3_options",
    "kvstore.gcs_options",
    "kvstore.scratch",
    "kvstore.local",
    "kvstore.listing",
    "kvstore.buffers",
    "kvstore.retries",
    "kvstore.client",
    "kvstore.fsspec_errors",
    "kvstore.fsspec_client",
    "kvstore.obstore_errors",
    "kvstore.obstore_client",
    "kvstore.session",
    "kvstore.failures",
    "kvstore.filesystem",
    "kvstore.upkeep",
    "kvstore.survey",
    "kvstore.namespace",
    "kvstore.chunks",
    "kvstore.blocks",
    "kvstore.converted",
    "kvstore.memory",
    "kvstore.store",
    "kvstore.__init__",
    "kvstore.seldom",
    "kvstore.circuit",
    "kvstore.capacity",
    "kvstore.collector",
    "kvstore.parts",
    "kvstore.mover",
    "kvstore.job",
    "kvstore.transfer",
    "kvstore.region",
    "kvstore.links",
    "kvstore.processes",
    "kvstore.jobs",
    "kvstore.health",
    "kvstore.trials",
    "kvstore.caretaker",
    "kvstore.tensors",
    "kvstore.rows",
    "kvstore.zarr_dtype",
    "kvstore.offline.shares",
    "kvstore.offline.place",
    "kvstore.offline.block",
    "kvstore.offline.group",
    "kvstore.offline.root",
    "kvstore.offline.sizes",
    "kvstore.offline.journal",
    "kvstore.offline.faults",
    "kvstore.offline.proof",
    "kvstore.offline.upper",
    "kvstore.offline.verify",
    "kvstore.offline.gc",
    "kvstore.offline.whole",
    "kvstore.offline.copying",
    "kvstore.offline.target",
    "kvstore.offline.landing",
    "kvstore.offline.convert",
    "kvstore.offline.diff",
    "kvstore.offline.views",
    "kvstore.offline.vllm_rows",
    "kvstore.offline.vllm_fs",
    "kvstore.offline.import_vllm",
    "kvstore.offline.contents",
    "kvstore.offline.colours",
    "kvstore.offline.figure",
    "kvstore.offline.census",
    "kvstore.offline.words",
    "kvstore.offline.report",
    "kvstore.offline.page",
    "kvstore.offline.checks",
    "kvstore.offline.folder",
    "kvstore.offline.speed",
    "kvstore.offline.writing",
    "kvstore.offline.doctor",
    "kvstore.offline.__init__",
    "kvstore.cli.codes",
    "kvstore.cli.streams",
    "kvstore.cli.options",
    "kvstore.cli.output",
    "kvstore.cli.work",
    "kvstore.cli.looking",
    "kvstore.cli.verify",
    "kvstore.cli.gc",
    "kvstore.cli.copying",
    "kvstore.cli.convert",
    "kvstore.cli.diff",
    "kvstore.cli.import_vllm",
    "kvstore.cli.heat",
    "kvstore.cli.plot",
    "kvstore.cli.report",
    "kvstore.cli.doctor",
    "kvstore.cli.app",
    "kvstore.__main__",
    "kvstore.cli.__init__",
    "kvstore.testing.roots",
    "kvstore.testing.conformance",
    "kvstore.testing.__init__",
    "kvstore.testing.plans",
    "kvstore.testing.faults",
    "kvstore.testing.model",
    "kvstore.testing.damage",
    "kvstore.testing.draws",
    "kvstore.testing.stateful",
    "kvstore.vllm.options",
    "kvstore.vllm.weights",
    "kvstore.vllm.layout",
    "kvstore.vllm.identity",
    "kvstore.vllm.host_worker",
    "kvstore.vllm.lookups",
    "kvstore.vllm.metrics",
    "kvstore.vllm.events",
    "kvstore.vllm.hits",
    "kvstore.vllm.observed",
    "kvstore.vllm.opened",
    "kvstore.vllm.refusing",
    "kvstore.vllm.tier",
    "kvstore.vllm.connector",
    "kvstore.vllm.__init__",
]

# Where a foreign library may be imported, by the beginning of the module's name.
BORDERS = {
    "fsspec": ("kvstore.fsspec_client", "kvstore.testing.roots"),
    "obstore": ("kvstore.obstore_client",),
    "distributed": ("kvstore.cli.work",),
    "jinja2": ("kvstore.offline.page",),
    "markupsafe": ("kvstore.offline.page",),
    "matplotlib": ("kvstore.offline.figure",),
    "botocore": ("kvstore.s3_options",),
    "google": ("kvstore.gcs_options",),
    "zarr": ("kvstore.offline.views", "kvstore.zarr_dtype"),
    "xarray": ("kvstore.offline.views",),
    "crc32c": ("kvstore.codecs",),
    "numcodecs": ("kvstore.codecs",),
    "hypothesis": ("kvstore.testing.draws", "kvstore.testing.stateful"),
    "pytest": ("kvstore.testing.conformance",),
    "torch": ("kvstore.offline.views", "kvstore.vllm."),
    "vllm": ("kvstore.vllm.",),
}

MAX_LINES = 330


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules that `tree` imports, and of what it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def first_party(tree: ast.AST) -> set[str]:
    """The modules of this package that `tree` imports."""
    names = set(imports(tree))
    found = names & MODULES.keys()
    # `from kvstore import local` names the package only on the way to the module.
    packages = {name for name in names if f"{name}.__init__" in MODULES}
    for package in packages:
        if not any(name.startswith(f"{package}.") for name in found):
            found.add(f"{package}.__init__")
    return found


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


# ---- one-way imports


def test_every_module_has_its_place_in_the_house() -> None:
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down_only(module: str) -> None:
    below = ORDER[: ORDER.index(module)]
    assert first_party(parse(module)) <= set(below)


@pytest.mark.parametrize("module", ORDER)
def test_foreign_libraries_stop_at_their_border(module: str) -> None:
    foreign = {name.partition(".")[0] for name in imports(parse(module))}
    for library in foreign & BORDERS.keys():
        assert module.startswith(BORDERS[library]), library


@pytest.mark.parametrize("module", ORDER)
def test_no_first_party_import_hides_in_a_function(module: str) -> None:
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            assert not any(name.startswith("kvstore") for name in imports(node))


def test_errors_import_nothing_of_ours() -> None:
    assert first_party(parse("kvstore.errors")) == set()


def test_the_checks_above_see_what_they_are_for() -> None:
    tree = ast.parse(
        "from kvstore import local\n"
        "import kvstore.jobs\n"
        "def f():\n"
        "    from kvstore.store import BlockStore\n"
        "    import fsspec.asyn\n"
    )
    assert first_party(tree) == {"kvstore.local", "kvstore.jobs", "kvstore.store"}
    assert "fsspec.asyn" in set(imports(tree))
    assert first_party(ast.parse("from kvstore import Layout")) == {"kvstore.__init__"}


@pytest.mark.parametrize("module", ORDER)
def test_a_file_fits_on_a_few_screens(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", ORDER)
def test_a_module_opens_with_its_purpose(module: str) -> None:
    assert ast.get_docstring(parse(module))


# ---- what users import


def test_all_is_sorted_and_without_repetition() -> None:
    assert all(a < b for a, b in pairwise(kvstore.__all__))


@pytest.mark.parametrize("name", kvstore.__all__)
def test_all_is_importable(name: str) -> None:
    assert hasattr(kvstore, name)


def test_all_is_everything_that_is_public() -> None:
    modules = {name.split(".")[1] for name in MODULES}
    public = {n for n in vars(kvstore) if not n.startswith("_")} - modules
    assert public == set(kvstore.__all__) - {"__version__"}


def test_every_error_is_exported() -> None:
    errors = import_module("kvstore.errors")
    theirs = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert theirs <= set(kvstore.__all__)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `statement`."""
    told = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in told.stdout.split()}


def test_importing_kvstore_needs_no_engine_and_no_zarr() -> None:
    loaded = loaded_by("import kvstore")
    assert "kvstore" in loaded
    assert not loaded & {
        "torch",
        "vllm",
        "zarr",
        "pytest",
        "s3fs",
        "gcsfs",
        "obstore",
        "botocore",
    }


def test_the_jobs_and_rows_need_no_engine_either() -> None:
    loaded = loaded_by("import kvstore.jobs, kvstore.rows")
    assert not loaded & {"torch", "vllm", "zarr", "pytest"}


def test_a_cache_is_looked_at_without_other_libraries_for_arrays() -> None:
    loaded = loaded_by("import kvstore.offline")
    assert not loaded & {"torch", "vllm", "xarray", "zarr"}


def test_views_import_what_they_are_asked_for() -> None:
    loaded = loaded_by("import kvstore.offline.views")
    assert "zarr" in loaded
    assert not loaded & {"torch", "vllm", "xarray"}


# ---- the distribution


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_the_installed_version_is_the_codes_own() -> None:
    try:
        installed = metadata.version("kvstore-zarr")
    except metadata.PackageNotFoundError:
        pytest.skip("kvstore runs from the checkout and is not installed")
    assert installed == kvstore.__version__


def test_zarr_finds_the_data_type_where_kvstore_is_installed() -> None:
    try:
        distribution = metadata.distribution("kvstore-zarr")
    except metadata.PackageNotFoundError:
        pytest.skip("kvstore runs from the checkout and is not installed")
    [entry] = [e for e in distribution.entry_points if e.group == "zarr.data_type"]
    assert entry.load() is import_module("kvstore.zarr_dtype").BFloat16
