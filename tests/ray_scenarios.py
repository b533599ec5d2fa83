"""What happens to a pool when a node goes, or Ray itself: each a process of its own, run by ``test_ray_scenarios.py``.

Prints one line of JSON.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Before Ray is imported: a cluster of several nodes asks for tokens otherwise.
os.environ["RAY_AUTH_MODE"] = "disabled"

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

import omnibatch as ob
from omnibatch.prompt_files import make_requests
from omnibatch.ray import RolloutPool, cluster, supervisor
from omnibatch.tiny import EXAMPLE_PROMPTS

CONFIG = ob.RolloutConfig(step_execution=True, max_num_seqs=4, rows_per_forward=4)


def make(**extra_args):
    """Requests of many steps, so that most are still in flight when the first have ended."""
    sampling = ob.OmniDiffusionSamplingParams(
        num_inference_steps=40, guidance_scale=1.0, max_sequence_length=32, extra_args=extra_args
    )
    return make_requests(EXAMPLE_PROMPTS[:4], sampling, images_per_prompt=16, seed=0)


def expected(requests):
    torch.set_num_threads(1)
    engine = ob.RolloutEngine(ob.load("tiny-sd35", device="cpu", dtype=torch.float32), CONFIG)
    with torch.no_grad():
        for weight in engine.adapter.transformer.parameters():
            weight.mul_(1.01)
    return engine.adapter.transformer.state_dict(), {output.request_id: output for output in engine.generate(requests)}


def run(disturb, requests):
    """Run requests with updated weights, disturb them after the third output, and compare."""
    weights, reference = expected(requests)
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=2, health_check_timeout_s=20) as pool:
        pool.update_weights(weights)
        outputs = []
        for output in pool.stream(requests):
            outputs.append(output)
            if len(outputs) == 3:
                disturb()
        sendings = next(pool._coordinator._sendings)
    return {
        "some were sent again": sendings > len(reference),
        "ids": len(outputs) == len({output.request_id for output in outputs}) == len(reference),
        "errors": [str(output.error) for output in outputs if output.error is not None],
        "same": all(
            torch.equal(getattr(output, name), getattr(reference[output.request_id], name))
            for output in outputs
            if output.error is None
            for name in ("output", "trajectory_latents", "trajectory_log_probs")
        ),
        "versions": sorted({output.weights_version for output in outputs}),
    }


def node_removed():
    """One of two nodes that hold a replica each goes."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    workers = [nodes.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")

    result = run(lambda: nodes.remove_node(workers[0]), make())
    ray.shutdown()
    nodes.shutdown()
    return result


def ray_restarted():
    """The whole of Ray is killed and started again.

    Outputs, of a few steps each, are small enough not to need the object store: Ray itself ends a process that uses
    the store of its own machine while that is gone.
    """
    cluster.ANSWER_SECONDS, supervisor.TRIES_UNTIL_DOUBT = 5.0, 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A folder of its own, where nobody looks for the cluster when it is gone; short, since sockets lie in it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = [f"--temp-dir={folder}", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]

    def start():
        ray_command = Path(sys.executable).with_name("ray")
        subprocess.run([ray_command, "start", "--head", f"--port={port}", *options], check=True, capture_output=True)

    def stop():
        # "ray stop" would stop every Ray of the machine.
        for process in psutil.process_iter(["cmdline"]):
            if re.search(rf"(port=|address=\S*:){port}\b", " ".join(process.info["cmdline"] or [])):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def disturb():
        stop()
        start()

    start()
    ray.init(address=f"127.0.0.1:{port}", log_to_driver=False, logging_level="ERROR")
    result = run(disturb, make(sde_window_size=3))
    ray.shutdown()
    stop()
    shutil.rmtree(folder, ignore_errors=True)
    return result


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
