"""The names of files in a model directory: those of transformers and the Hub, and lineage.json, which is ours.

Modules that may not import each other share them here: stages/model/ reads these files, stages/export/ writes them.
"""

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The directory of those that have another name than `default`."""
OLD_CHAT_TEMPLATE = "chat_template.json"
"""Where multimodal models had it before."""
WEIGHTS = "model.safetensors"
"""All weights, where they fit in one file."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Where they do not: the file of each tensor."""
CARD = "README.md"
"""The model card: metadata for the Hub, and a text."""
LINEAGE = "lineage.json"
"""Where the model comes from; `consolidate` writes it."""
