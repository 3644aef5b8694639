"""Memories: what a site keeps of the tokens that it has read. Each kind is a class with the protocol of `Memory`."""

from t2r.attention.memories.base import Memory
from t2r.attention.memories.keys_values import KeyValueMemory
from t2r.attention.memories.shape import Shape
from t2r.attention.memories.state import Added, StateMemory
from t2r.attention.memories.window import BUFFERS, WindowMemory

__all__ = ["BUFFERS", "Added", "KeyValueMemory", "Memory", "Shape", "StateMemory", "WindowMemory"]
