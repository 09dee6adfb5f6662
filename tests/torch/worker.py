"""The other side of ``conftest.ranks``: forks one process a rank and runs a scenario of ``scenarios_*.py`` in
each.

torch is imported once, before the forks: on few cores that is most of a small test's time.
"""

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # DDP's constructor imports it, which takes two seconds: once here instead of in every rank
import torch.distributed
import torch.nn.parallel

HERE = Path(__file__).parent


def load_scenarios():
    found = {}
    for path in sorted(HERE.glob("scenarios_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.update({name: value for name, value in vars(module).items() if callable(value)})
    return found


def start(scenario, rank, request):
    """Fork a rank. The child leaves by SystemExit, so that its interpreter ends as any other."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(output_file(request, rank), os.O_CREAT | os.O_WRONLY, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(request["world_size"]))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        scenario(rank, request["world_size"], request["folder"], **request["options"])
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def output_file(request, rank):
    return f"{request['folder']}/output-{rank}"


def wait(pids, timeout_s):
    """Exit codes in the order of ``pids`` (negative: signal); whoever is late is killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main():
    scenarios = load_scenarios()
    for line in sys.stdin:
        request = json.loads(line)
        scenario = scenarios[request["scenario"]]
        pids = [start(scenario, rank, request) for rank in range(request["world_size"])]
        codes = wait(pids, request["timeout_s"])
        outputs = [Path(output_file(request, rank)).read_text(errors="replace") for rank in range(len(pids))]
        sys.stdout.write(json.dumps({"codes": codes, "outputs": outputs}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
