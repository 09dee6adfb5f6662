"""A worker that speaks the protocol of ``dblp.sim.lab.ranks`` and does what FAKE says, for tests of the parent's side."""

import json
import os
import signal
import sys
import time

rank = int(os.environ["RANK"])


def say(**event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    command = json.loads(line)
    what = command["do"]
    if what == "end":
        break
    if rank == command.get("rank", rank):
        if what == "die":
            # gloo's warning comes after the last words, and is no reason
            sys.stderr.write(
                "last words\n[W] The hostname of the client socket cannot be retrieved. err=-3\n"
            )
            sys.exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fail":
            say(kind="error", text="no room")
        if what == "hang":
            time.sleep(60)
    say(kind="progress", rank=rank)
    say(kind="done", rank=rank, host=os.environ["GLOO_SOCKET_IFNAME"], impair=os.environ.get("DBLP_IMPAIR"))
