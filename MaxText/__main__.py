import sys

from MaxText.cli import main

if __name__ == "__main__":
    sys.exit(main())
