"""Pipeline parallelism: which layers lie on which stage, when each microbatch passes them, and how it gets there."""

from MaxText.pipeline.run import from_owner as from_owner
from MaxText.pipeline.run import run as run
from MaxText.pipeline.schedule import AXIS as AXIS
from MaxText.pipeline.schedule import Schedule as Schedule
from MaxText.pipeline.schedule import make as make
from MaxText.pipeline.schedule import pipelined_segment as pipelined_segment
from MaxText.pipeline.schedule import problems as problems
