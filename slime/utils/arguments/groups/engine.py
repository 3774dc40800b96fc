"""Flags: the router and the engines, as far as they are slime's own; SGLang's own flags come from its table."""

from slime.utils.arguments.flag import Flag, FlagGroup

GROUP = FlagGroup(
    "engine",
    "Engines and router",
    [
        Flag("--engine-start-timeout", float, 1800.0, "Seconds an engine has to become ready."),
        Flag("--sglang-server-concurrency", int, 512, "Requests in flight per engine."),
        Flag("--sglang-router-ip", str, None, "Address of a router that runs already.", supported=False),
        Flag("--sglang-router-port", int, None, "Port of a router that runs already.", supported=False),
        Flag("--sglang-router-request-timeout-secs", int, 14400, "Seconds a request may take."),
        Flag("--sglang-config", str, None, "YAML file with models and server groups.", supported=False),
        Flag("--prefill-num-servers", int, None, "Engines that only prefill.", supported=False),
    ],
)
