from .assessment import assess as assess
from .assessment import check_plugins as check_plugins, list_plugins as list_plugins
