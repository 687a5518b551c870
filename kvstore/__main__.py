"""`python -m kvstore`: the command line."""

from kvstore.cli.app import main

if __name__ == "__main__":
    main()
