from .assessment import assessed as assessed
from .plugins import check_plugins as check_plugins, known_plugins as known_plugins
