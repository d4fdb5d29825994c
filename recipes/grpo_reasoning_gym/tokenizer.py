"""Questions -> a small byte-level BPE tokenizer with ChatML, in the exact form AutoTokenizer gives back.

transformers loads the tokenizer of any Qwen2 directory as its own Qwen2Tokenizer, pre-tokenizer included, whatever
was saved there. A tokenizer trained with another pre-tokenizer would cut text into other tokens in verl than in the
warm start. So ours is trained as a Qwen2Tokenizer, and `build` compares the two before anything is trained.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(texts: Sequence[str], directory: Path, max_vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """Trains on `texts`, saves to `directory` (which already holds the model's config) and loads it back."""
    trained = Qwen2Tokenizer().train_new_from_iterator(
        texts, max_vocabulary, new_special_tokens=[START_OF_TURN, END_OF_TURN], show_progress=False
    )
    trained.eos_token, trained.pad_token = END_OF_TURN, END_OF_TEXT
    trained.chat_template = CHAT_TEMPLATE
    trained.save_pretrained(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    _check_round_trip(trained, loaded, texts)
    return loaded


def _check_round_trip(trained, loaded, texts: Sequence[str]) -> None:
    for text in texts:
        chat = [{"role": "user", "content": text}]
        rendered = trained.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if trained.encode(rendered) != loaded.encode(rendered):
            raise RuntimeError(
                f"the saved tokenizer loads as {type(loaded).__name__} and cuts {text[:40]!r} into "
                f"{len(loaded.encode(rendered))} tokens, not {len(trained.encode(rendered))}; "
                "train it as the class that AutoTokenizer returns for this model type"
            )
    if (loaded.eos_token, loaded.pad_token) != (END_OF_TURN, END_OF_TEXT):
        raise RuntimeError(f"eos and pad came back as {loaded.eos_token!r} and {loaded.pad_token!r}")
