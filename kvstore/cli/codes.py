"""What commands end with.

0    done, and nothing is wrong
1    done, and something was found: damage, a difference, a failed check, what was left out
2    the arguments or the URL cannot be used
3    storage failed, or the Dask cluster, or stdout
4    refused: what is stored there is of another kind
130  interrupted
141  nobody reads stdout any more
143  terminated

A shell says the last three so.
"""

FOUND, UNUSABLE, FAILED, REFUSED, BROKEN_PIPE = 1, 2, 3, 4, 141
