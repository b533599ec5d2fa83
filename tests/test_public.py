"""The public surface."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import omnibatch
import omnibatch.scheduler


def test_all_is_small_and_resolves():
    assert len(omnibatch.__all__) <= 12
    assert list(omnibatch.__all__) == sorted(omnibatch.__all__)
    assert all(hasattr(omnibatch, name) for name in omnibatch.__all__)


def test_import_brings_no_model_library():
    code = "import sys, omnibatch; print([m for m in ('diffusers', 'transformers', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_scheduler_is_plain_python():
    tree = ast.parse(Path(omnibatch.scheduler.__file__).read_text())
    roots = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {root.split(".")[0] for root in roots} <= sys.stdlib_module_names


def test_the_structure_page_names_every_module_and_no_other():
    package = Path(omnibatch.__file__).parent
    page = (package.parents[1] / "CONTRIBUTING.md").read_text()
    modules = {path.relative_to(package).as_posix() for path in [*package.glob("*.py"), *package.glob("adapters/*.py")]}
    modules = {name for name in modules if not name.endswith("__init__.py")}
    named = set(re.findall(r"`((?:adapters/)?\w+\.py)`", page))
    assert modules <= named
    assert {name for name in named - modules if not (package / "tiny" / name).exists()} == set()
