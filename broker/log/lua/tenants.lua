-- Tenants: their weights and bounds.
-- Keys:  shard base  :tenants  hash  tenant, or '*' for all others -> '<weight> <max open> <max per minute>';
--                                   ':memory' -> see admission.lua

local store = require('store/prelude')
local tenants = {}

-- The share of a tenant: its name in the fair queue, its weight, its bounds; 0 for no bound.
function tenants.share_of(shard, tenant)
  local named, others = unpack(redis.call('HMGET', shard .. ':tenants', tenant, '*'))
  local weight, open, pace = string.match(named or others or '', '^(%S+) (%S+) (%S+)$')
  weight = store.number_of(weight)
  if not weight or weight < 0.001 or weight > 1000 then weight = 1 end
  return (named or not others) and tenant or '*', weight, store.number_of(open) or 0, store.number_of(pace) or 0
end

-- set_tenants: replace the weights and bounds of all tenants; see turns.lua and admission.lua.
-- KEYS shard base.  ARGV field, value …   returns {'set'}
local function set_tenants(keys, args)
  local key = keys[1] .. ':tenants'
  redis.call('DEL', key)
  for i = 1, #args, 2 do redis.call('HSET', key, args[i], args[i + 1]) end
  return {'set'}
end

redis.register_function('deck_set_tenants', set_tenants)

return tenants
