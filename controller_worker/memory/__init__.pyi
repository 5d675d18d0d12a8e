from .condensers.condenser import Condenser as Condenser, Inquiry as Inquiry
from .condensers.condenser import render_events as render_events
from .condensers.registry import create_condenser as create_condenser
from .conversation_memory import MAX_MESSAGE_CHARS as MAX_MESSAGE_CHARS, ConversationMemory as ConversationMemory
from .conversation_memory import PromptOptions as PromptOptions
from .view import View as View, ViewFold as ViewFold
