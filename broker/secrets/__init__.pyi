from .masking import MASK as MASK, MaskedPieces as MaskedPieces, Masker as Masker
from .private_directories import MAX_LINKS as MAX_LINKS, Mounts as Mounts, fault as fault, name_fault as name_fault
from .private_directories import on_the_way as on_the_way, private_paths as private_paths
from .private_directories import workspace_roots as workspace_roots
from .secrets import ONE_KEY as ONE_KEY, ClaimedSecrets as ClaimedSecrets, KnownValues as KnownValues
from .secrets import Secrets as Secrets, SecretsLocked as SecretsLocked, check_secret as check_secret
from .secrets import decrypt as decrypt, encrypt as encrypt, key_name as key_name, secret_key as secret_key
