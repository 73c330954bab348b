"""The rules of the house, read from the source: each a function from source to complaints, proven on a bad snippet."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "MaxText"

# A room (a file or a folder of MaxText/) imports only from the rooms before it.
ORDER = """
    early errors faults crc processes compat config catalogue hardware layout sequence blueprint architecture pipeline
    flops planner remat cost layers decoder balance loss tokenizer data share evaluate optimizer state step runtime
    forecast aot plan_verb doctor checkpoint metrics goodput report records session screen resume loop generate convert
    walk train launch cli __main__
"""
ROOMS = ORDER.split()

# These answer a mistake in the configuration, and must do so within a second.
LIGHT = ("__init__", "errors", "processes", "config", "launch", "cli", "__main__")
HEAVY = {"absl", "flax", "grain", "jax", "jaxlib", "ml_collections", "numpy", "optax", "orbax", "scipy", "tensorstore"}

EVERYTHING = {"Exception", "BaseException"}
MESH_AXES = {"pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor"}
LONGEST_FUNCTION, LONGEST_FILE, MEDIAN_FUNCTION = 60, 400, 15
Function = ast.FunctionDef | ast.AsyncFunctionDef


def imports(tree: ast.AST, package: str = "MaxText") -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import in `tree`, a module inside `package`; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def room_of(path: Path) -> str:
    """The room that a file of MaxText/ belongs to: its own name, or its folder's."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parts[:-1])


def wrong_direction(source: str, room: str, package: str = "MaxText") -> list[str]:
    """Imports of `room` from a room that comes after it, or from one that is not in the order."""
    complaints = []
    for line, name in imports(ast.parse(source), package):
        parts = name.split(".")
        if parts[0] != "MaxText" or parts[1:2] in ([], [room], ["__version__"]):
            continue
        target = parts[1]
        if target not in ROOMS:
            complaints.append(f"line {line}: {name} names no room of the order")
        elif room == "__init__" or ROOMS.index(target) > ROOMS.index(room):
            complaints.append(f"line {line}: {room} imports {target}, which comes after it")
    return complaints


def at_module_level(tree: ast.Module) -> ast.Module:
    """`tree` without what does not run on import: function bodies and `if TYPE_CHECKING`."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node: Function) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

        def visit_If(self, node: ast.If) -> ast.AST:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = [ast.Pass()]
            return self.generic_visit(node)

    return Prune().visit(tree)


def heavy_imports(source: str, package: str = "MaxText") -> list[str]:
    """Imports that run when the module is imported and bring in an array library."""
    tree = at_module_level(ast.parse(source))
    return [f"line {line}: {name}" for line, name in imports(tree, package) if name.split(".")[0] in HEAVY]


def mesh_words(source: str) -> list[str]:
    """String constants that name a mesh axis."""
    constants = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    words = ((node.lineno, node.value) for node in constants if isinstance(node.value, str))
    return [f"line {line}: {word!r}" for line, word in words if word in MESH_AXES]


def bare_walls(source: str) -> list[str]:
    """Uses of `jax.shard_map`, whose body a pipeline would batch; `layout.shard_map` shows it one stage."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [f"line {node.lineno}" for node in nodes if ast.unparse(node) == "jax.shard_map"]


def version_branches(source: str) -> list[str]:
    """Places that ask which JAX this is: its version, or what it has."""
    asks = re.compile(
        r"(jax|jaxlib)\.__version(_info)?__$|hasattr\(jax\b|(importlib\.metadata\.)?version\('jax(lib)?'\)$"
    )
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute | ast.Call))
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in nodes if asks.match(ast.unparse(node))]


def functions(source: str) -> list[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function, methods and inner ones included."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    return [(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes]


def too_long(source: str) -> list[str]:
    everything = [("the file", 1, source.count("\n"))] if source.count("\n") > LONGEST_FILE else []
    everything += [function for function in functions(source) if function[2] > LONGEST_FUNCTION]
    return [f"line {line}: {name} has {length} lines" for name, line, length in everything]


def public_functions(nodes: list[ast.stmt]) -> Iterator[Function]:
    """Functions at the top of a module and methods of its classes whose names do not begin with one underscore."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and (not node.name.startswith("_") or node.name.startswith("__")):
            yield node


def untyped_doors(source: str) -> list[str]:
    """Public functions of which an argument or the result has no type (`__init__` and its kind need none for it)."""
    complaints = []
    for function in public_functions(ast.parse(source).body):
        given = function.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
        bare = [arg.arg for arg in every if arg.annotation is None and arg.arg not in ("self", "cls")]
        bare += ["its result"] if function.returns is None and not function.name.startswith("__") else []
        complaints += [f"line {function.lineno}: {function.name}: no type for {', '.join(bare)}"] if bare else []
    return complaints


def says_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def hides(handler: ast.ExceptHandler) -> bool:
    """True for a bare or empty handler, and for one that catches everything and neither raises nor uses it."""
    if handler.type is None or all(says_nothing(statement) for statement in handler.body):
        return True
    caught = {ast.unparse(kind) for kind in getattr(handler.type, "elts", [handler.type])}
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    raises = any(isinstance(node, ast.Raise) for node in inside)
    uses = any(isinstance(node, ast.Name) and node.id == handler.name for node in inside)
    return bool(EVERYTHING & caught) and not (raises or uses)


def suppresses_all(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and bool(EVERYTHING & {ast.unparse(a) for a in call.args})


def swallowed(source: str) -> list[str]:
    """Where an error disappears. One that may really be ignored is named in `contextlib.suppress(ThatError)`."""
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and hides(node) or isinstance(node, ast.Call) and suppresses_all(node):
            complaints.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return complaints


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def check(complaints: dict[Path, list[str]]) -> None:
    wrong = [f"{path.relative_to(ROOT)}: {text}" for path, texts in complaints.items() for text in texts]
    assert not wrong, "\n".join(wrong)


MODULES = python_files(PACKAGE)
ALL_CODE = [*MODULES, *python_files(ROOT / "tests", ROOT / "benchmarks"), *ROOT.glob("*.py")]


def test_every_file_is_in_a_room():
    assert {room_of(path) for path in MODULES} - {"__init__", "texts"} <= set(ROOMS)


def test_imports_go_one_way():
    check({path: wrong_direction(path.read_text(), room_of(path), package_of(path)) for path in MODULES})


def test_what_answers_config_mistakes_is_light():
    check({path: heavy_imports(path.read_text(), package_of(path)) for path in MODULES if room_of(path) in LIGHT})


@pytest.mark.parametrize("module", ["MaxText", "MaxText.errors", "MaxText.config", "MaxText.cli", "MaxText.train"])
def test_importing_it_really_loads_nothing_heavy(module: str):
    relative = Path(*module.split("."))
    if not (ROOT / relative).is_dir() and not (ROOT / relative).with_suffix(".py").exists():
        pytest.skip(f"{module} is not built yet")
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_layers_know_no_mesh():
    check({path: mesh_words(path.read_text()) for path in MODULES if room_of(path) == "layers"})


def test_walls_of_layers_are_those_of_the_layout():
    check({path: bare_walls(path.read_text()) for path in MODULES if room_of(path) in ("layers", "sequence")})
    assert len(bare_walls("y = jax.shard_map(f, in_specs=s, out_specs=s)(x)")) == 1
    assert bare_walls("y = layout.shard_map(f, in_specs=s, out_specs=s)(x)") == []


def test_only_compat_asks_for_the_version_of_jax():
    check({path: version_branches(path.read_text()) for path in MODULES if room_of(path) != "compat"})


def test_files_and_functions_are_short():
    check({path: too_long(path.read_text()) for path in ALL_CODE})
    lengths = [n for path in MODULES for _, _, n in functions(path.read_text())]
    assert statistics.median(lengths or [0]) < MEDIAN_FUNCTION


def test_public_functions_have_types():
    check({path: untyped_doors(path.read_text()) for path in MODULES})


def test_no_exception_is_swallowed():
    check({path: swallowed(path.read_text()) for path in ALL_CODE})


def test_nothing_outside_the_project_is_named():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    outside = b"/".join([b"..", b"shared"])
    assert [path for path in paths if path.is_file() and outside in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("source", "room", "package"),
    [
        ("from MaxText import decoder", "layers", "MaxText.layers"),
        ("import MaxText.train", "step", "MaxText"),
        ("from MaxText.decoder import forward", "layers", "MaxText.layers"),
        ("from ..decoder import forward", "layers", "MaxText.layers"),
        ("from . import train", "step", "MaxText"),
        ("def f():\n    from MaxText import train", "step", "MaxText"),
        ("from MaxText import nonsense", "step", "MaxText"),
        ("from MaxText import errors", "__init__", "MaxText"),
    ],
)
def test_the_direction_check_catches(source: str, room: str, package: str):
    assert len(wrong_direction(source, room, package)) == 1


def test_the_direction_check_allows_earlier_rooms_and_its_own():
    allowed = [
        "import jax, MaxText",
        "from MaxText import config, __version__",
        "from ..errors import X",
        "from . import norm",
    ]
    assert wrong_direction("\n".join(allowed), "layers", "MaxText.layers") == []


def test_the_weight_check_catches():
    bad = "import numpy as np\ntry:\n    from jax import jit\nfinally:\n    f()\nclass A:\n    import optax"
    assert len(heavy_imports(bad)) == 3
    assert heavy_imports("if TYPE_CHECKING:\n    import jax\ndef f():\n    import jax\nimport yaml") == []


def test_the_mesh_word_check_catches():
    assert len(mesh_words("P('fsdp', None)\nmesh.shape['tensor']\n{'data': 1}")) == 3
    assert mesh_words('"""The data walks through."""\ndata = f(experts="experts")') == []


def test_the_version_check_catches():
    bad = [
        "jax.__version__",
        "jax.__version_info__ > (0,)",
        "hasattr(jax, 'x')",
        "hasattr(jax.lax, 'x')",
        "version('jax')",
    ]
    assert len(version_branches("\n".join(bad))) == 5
    assert version_branches("hasattr(x, 'y')\njax.devices()\nMaxText.__version__") == []


def test_the_length_check_catches():
    assert len(too_long("def f():\n" + "    x = 1\n" * LONGEST_FUNCTION)) == 1
    assert too_long("def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION - 1)) == []
    assert len(too_long("x = 1\n" * (LONGEST_FILE + 1))) == 1


def test_the_type_check_catches():
    bad = "def f(x): ...\ndef g() -> int: ...\nclass A:\n    def m(self, *rest) -> int: ...\n    def n(self): ..."
    assert len(untyped_doors(bad)) == 3
    assert (
        untyped_doors("def _f(x): ...\ndef g(x: int) -> int:\n    def inner(y): ...\nclass _B:\n    def f(x): ...")
        == []
    )


@pytest.mark.parametrize(
    "handler",
    [
        "except:\n    raise",
        "except OSError:\n    pass",
        "except OSError:\n    ...",
        "except Exception:\n    log('it failed')",
        "except (OSError, BaseException) as e:\n    x = 1",
    ],
)
def test_the_exception_check_catches(handler: str):
    assert len(swallowed(f"try:\n    f()\n{handler}")) == 1


def test_the_exception_check_allows_what_is_told_or_named():
    assert len(swallowed("with contextlib.suppress(Exception):\n    f()")) == 1
    assert swallowed("with contextlib.suppress(FileNotFoundError):\n    f()") == []
    assert swallowed("try:\n    f()\nexcept Exception as error:\n    queue.put(error)") == []
    assert swallowed("try:\n    f()\nexcept KeyError:\n    x = 0") == []
