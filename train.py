"""python train.py CONFIG [key=value ...]"""

import sys

from MaxText.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
