"""Several processes that make one run: who is here, what they agree on, and the end of all when one is lost.

Beside JAX's own coordination service there is one small TCP channel: process 0 runs a `Hub`, every process (0 as well)
is a `Member` of it. It works before JAX is imported and while JAX is stuck, and it knows names. Nothing here imports
JAX.
"""

from MaxText.processes.group import Alone as Alone
from MaxText.processes.group import Group as Group
from MaxText.processes.group import Several as Several
from MaxText.processes.group import join as join
from MaxText.processes.place import Place as Place
from MaxText.processes.place import find as find
