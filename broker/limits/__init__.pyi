from .batches import Batch as Batch, BatchCallStatus as BatchCallStatus, Batches as Batches
from .governor import CallGranted as CallGranted, CallOutcome as CallOutcome, CallQueued as CallQueued
from .governor import SETTABLE as SETTABLE, Governor as Governor, render_set_limits as render_set_limits
from .governor import check_limits as check_limits, set_limits as set_limits
from .ledger import MAX_USD as MAX_USD, BudgetAccount as BudgetAccount, Ledger as Ledger, list_accounts as list_accounts
from .ledger import make_experiment_account as make_experiment_account, make_tenant_account as make_tenant_account
from .ledger import parse_account as parse_account
from .quotas import OWN_KEY as OWN_KEY, Quota as Quota, QuotaKey as QuotaKey, QuotaPool as QuotaPool
from .quotas import QuotaTable as QuotaTable
from .tenants import TenantTable as TenantTable, parse_memory_bound as parse_memory_bound
from .tenants import TenantStatus as TenantStatus, load_tenants as load_tenants, publish_tenants as publish_tenants
