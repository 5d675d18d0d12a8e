from .masking import MASK as MASK, MaskedPieces as MaskedPieces, Masker as Masker
from .private_directories import MAX_LINKS as MAX_LINKS, Mounts as Mounts, find_fault as find_fault
from .private_directories import find_name_fault as find_name_fault, find_private_paths as find_private_paths
from .private_directories import parse_workspace_roots as parse_workspace_roots, resolve_links as resolve_links
from .references import SOURCE_PATTERN as SOURCE_PATTERN, SecretLookup as SecretLookup
from .references import SecretReference as SecretReference, SecretUnavailable as SecretUnavailable
from .references import SecretValue as SecretValue
from .secrets import ENDPOINT_KEY as ENDPOINT_KEY, ENDPOINT_URL as ENDPOINT_URL, OwnEndpoint as OwnEndpoint
from .secrets import ONE_KEY as ONE_KEY, ClaimedSecrets as ClaimedSecrets, Secrets as Secrets
from .secrets import SecretsLocked as SecretsLocked, SecretsProof as SecretsProof, check_secret as check_secret
from .secrets import decrypt as decrypt, encrypt as encrypt, key_fingerprint as key_fingerprint
from .secrets import load_secret_key as load_secret_key
