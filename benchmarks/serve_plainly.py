"""The `localllm` program without speculation, so that servers are compared at the same work."""

from localllm.cli.main import main
from localllm.engine.speculation import DraftLength

if __name__ == "__main__":
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign, assignment]
    main()
