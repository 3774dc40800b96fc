"""Entry point of the router process: `sglang_router.launch_router` without its import of sglang.

The router only wants sglang's tracing helpers, for its Python load balancer, and goes without them when the import
fails; importing sglang costs it more than ten times its own start. Seen in sglang-router 0.3.2.
"""

import sys

if __name__ == "__main__":
    if not {"--mini-lb", "--enable-trace"} & set(sys.argv):
        sys.modules["sglang"] = None
    from sglang_router.launch_router import main

    main()
