"""The options of an SGLang server that slime's rollout side reads, at their defaults."""

import dataclasses
from argparse import ArgumentParser

# Every process of slime's that touches engines comes by here: the place to name a device to it.
import tests.slime.real.device  # noqa: F401


@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    nccl_port: int | None = None
    dist_init_addr: str | None = None
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int | None = None
    enable_dp_attention: bool = False
    enable_memory_saver: bool = False
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    speculative_algorithm: str | None = None
    load_balance_method: str = "auto"
    trust_remote_code: bool = False
    random_seed: int | None = None
    skip_server_warmup: bool = False

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model-path")
        for long, short in (("data", "dp"), ("pipeline", "pp"), ("expert", "ep"), ("moe-data", "moe-dp")):
            names = (f"--{long}-parallel-size", f"--{short}-size")
            parser.add_argument(*names, dest=f"{short.replace('-', '_')}_size", type=int, default=1)
        for flag in ("--enable-dp-attention", "--enable-deterministic-inference"):
            parser.add_argument(flag, action="store_true")
        for name in (
            "--speculative-algorithm",
            "--mem-fraction-static",
            "--reasoning-parser",
            "--tool-call-parser",
        ):
            parser.add_argument(name)
