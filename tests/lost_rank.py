"""A rank that is killed, or one that waits for it."""

import os
import signal
import time

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
