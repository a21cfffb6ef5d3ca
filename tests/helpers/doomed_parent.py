"""Starts an engine process and waits to be killed: `python -m tests.helpers.doomed_parent REQUEST
OUTPUT LOAD_DELAY_S` prints the engine's pid."""

import os
import sys
import time

from engine.config import EngineConfig, ModelConfig, WireConfig
from tests.helpers.core_process import start_process


def main() -> None:
    request_address, output_address, load_delay_s = sys.argv[1:]
    config = EngineConfig(
        model=ModelConfig(path=os.devnull, model_type="scripted"),
        wire=WireConfig(
            request_addresses=(request_address,),
            output_addresses=(output_address,),
            heartbeat_interval_s=0.05,
        ),
    )
    engine = start_process(config, load_delay_s=float(load_delay_s))
    sys.stdout.write(f"{engine.pid}\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
