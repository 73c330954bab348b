"""python train.py CONFIG [key=value ...]"""

import sys

from MaxText import early

if __name__ == "__main__":
    early.install()
    from MaxText.train import main

    sys.exit(main(sys.argv[1:]))
