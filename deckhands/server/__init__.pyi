from .auth.api_keys import ApiKey as ApiKey
from .auth.api_keys import DEFAULT_BODY_BYTES as DEFAULT_BODY_BYTES
from .auth.api_keys import DEFAULT_REQUESTS_PER_MINUTE as DEFAULT_REQUESTS_PER_MINUTE
from .auth.api_keys import DEFAULT_STREAMS as DEFAULT_STREAMS, EVERY_TENANT as EVERY_TENANT, ApiKeys as ApiKeys
from .auth.api_keys import ListedKey as ListedKey, Scope as Scope
from .auth.key_files import load_api_key as load_api_key, load_token as load_token
from .auth.operations import Operations as Operations
from .auth.tickets import Tickets as Tickets
from .gateway import Gateway as Gateway, ServerOptions as ServerOptions
from .protocols.editor import EditorAgent as EditorAgent
from .serving import serve as serve, serve_in_loop as serve_in_loop
