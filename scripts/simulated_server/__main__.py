# SPDX-License-Identifier: Apache-2.0
"""``python -m simulated_server MODEL_FOLDER OPTION…``: write the model, then serve it.

The options are those of ``vllm serve``.
"""

import sys
from pathlib import Path

from . import model


def main() -> None:
    """Serve until a signal ends it."""
    folder, *options = sys.argv[1:]
    tokenizer = model.write(Path(folder))
    sys.argv = ["vllm", "serve", folder, "--tokenizer", str(tokenizer), *options]
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.model_executor.models import registry

    # vLLM looks at the model's class in a process of its own, whose start takes as long
    # as that of the server.
    registry._run_in_subprocess = lambda inspect_class: inspect_class()
    vllm_main()


if __name__ == "__main__":
    main()
