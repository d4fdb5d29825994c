"""A Qwen2 of about 100 thousand parameters and a byte-level tokenizer, made here and saved as one folder.

The tokenizer is saved, loaded again through ``AutoTokenizer`` and saved once more: for a folder with a qwen2
model, transformers loads its own Qwen2 pre-tokenizer whatever was saved, so only the second form is what
every later reader of the folder will see.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [f"What is {a} + {b}? The answer is {a + b}." for a in range(30) for b in range(30)]


def tiny_config(tokenizer: PreTrainedTokenizerFast, **overrides) -> Qwen2Config:
    options = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2Config(**(options | overrides))


def save_tokenizer(folder: Path, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Train the tokenizer, save it beside a qwen2 config, and return what ``AutoTokenizer`` makes of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    tiny_config(fast).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def save_tiny_model(folder: Path | str, seed: int = 0, **overrides) -> Path:
    """Write model (fp32) and tokenizer to ``folder``; ``overrides`` go to the ``Qwen2Config``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **overrides))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder
