from .batches import Batch as Batch, Batches as Batches, CallStands as CallStands
from .governor import CallOutcome as CallOutcome, Governor as Governor, Granted as Granted, InQueue as InQueue
from .ledger import LARGEST_USD as LARGEST_USD, Account as Account, Ledger as Ledger, account_path as account_path
from .ledger import accounts_of as accounts_of, experiment_account as experiment_account
from .ledger import tenant_account as tenant_account
from .quotas import OWN_KEY as OWN_KEY, Pool as Pool, QuotaTable as QuotaTable
from .tenants import TenantTable as TenantTable, memory_bound as memory_bound, publish as publish
