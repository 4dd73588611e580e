"""The adapter for vLLM: name this module in `kv_connector_module_path`.

It is the only part of the package that imports vLLM. What any engine would need lives in the
connector; here stand the translation of vLLM's calls and the rules about vLLM's blocks.
"""

from kvsluice.connector.vllm.adapter import SluiceConnector

__all__ = ["SluiceConnector"]
