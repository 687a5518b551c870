// Reads arrays with zarrita: folders are the arguments, and one line of JSON tells of each.
import FileSystemStore from "@zarrita/storage/fs";
import * as zarr from "zarrita";

async function read(folder) {
  const array = await zarr.open.v3(new FileSystemStore(folder), { kind: "array" });
  const { data, shape } = await zarr.get(array);
  return {
    shape,
    dimensions: array.dimensionNames,
    dtype: array.dtype,
    attributes: array.attrs,
    bytes: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("hex"),
  };
}

for (const folder of process.argv.slice(2)) {
  const told = await read(folder).catch((error) => ({ error: `${error.name}: ${error.message}` }));
  console.log(JSON.stringify(told));
}
