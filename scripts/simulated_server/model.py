# SPDX-License-Identifier: Apache-2.0
"""The folder of a model that is never computed: a configuration and a tokenizer."""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# No MLA model, for which the CPU platform would turn chunked prefill and prefix caching
# off, and one for which vLLM takes the method "mtp".
_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1_048_576,
    "torch_dtype": "bfloat16",
}
_SPECIAL = ("<unk>", "<s>", "</s>", "<user>", "<assistant>")
_TEMPLATE = (
    "<s>{% for m in messages %}<user>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(folder: Path) -> Path:
    """Write the model: each word " a" to " z" is one token, anything else unknown.

    Returns the folder of the tokenizer: beside the configuration its own class would be
    ignored for that of the configuration's model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    words = [*_SPECIAL, *(f" {letter}" for letter in string.ascii_lowercase)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"
