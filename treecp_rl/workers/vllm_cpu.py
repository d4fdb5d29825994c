"""verl's vLLM worker extension, for vLLM on the CPU: keeps each weight where a weight update can write it.

On the CPU vLLM packs linear weights into oneDNN's layout at load time and leaves an empty parameter behind, so
verl's next weight update fails. With oneDNN off it multiplies with the live weights. vLLM imports the extension
before it loads the model, which is when it must be known.
Use: actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=treecp_rl.workers.vllm_cpu.CPUWorkerExtension
"""

import vllm._custom_ops
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

vllm._custom_ops._supports_onednn = False


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension under a name whose import turns oneDNN off."""
