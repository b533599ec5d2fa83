"""A pool that loses a node, and one that loses Ray itself, each in a process and a cluster of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("scenario", ["node_removed", "ray_restarted"])
def test_every_request_ends_once_as_if_nothing_had_happened(scenario):
    script = Path(__file__).with_name("ray_scenarios.py")
    result = subprocess.run([sys.executable, script, scenario], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    outcome = json.loads(result.stdout.strip().splitlines()[-1])
    assert outcome == {"some were sent again": True, "ids": True, "errors": [], "same": True, "versions": [1]}
