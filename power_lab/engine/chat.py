from dataclasses import dataclass
@dataclass
class ChatTemplate:
    source: str
    bos: str
    eos: str
