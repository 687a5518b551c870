"""What happens to blocks when those who write them are killed, and storage fails and lies;
and to a running engine while its storage fails.

Commands, like the benchmarks: the tests run them small, and `python tests/chaos/kills.py`,
`many.py` and `outages.py` run them as long as one likes.
"""
