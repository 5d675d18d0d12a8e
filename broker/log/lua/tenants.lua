-- Tenants: their weights and bounds.
-- Keys:  shard base  :tenants  hash  tenant, or '*' for all others -> '<weight> <max open> <max per minute>', and behind
--                                   these, if its pools are limited, ' <pool>,<pool>…';
--                                   ':memory' -> see admission.lua

local store = require('store/prelude')
local tenants = {}

-- The share of a tenant: its name in the fair queue, its weight, its bounds, 0 for no bound, and its pools; nil for any.
function tenants.share_of(shard, tenant)
  local named, others = unpack(redis.call('HMGET', shard .. ':tenants', tenant, '*'))
  local weight, open, pace, pools = string.match(named or others or '', '^(%S+) (%S+) (%S+) ?(%S*)$')
  weight = store.number_of(weight)
  if not weight or weight < 0.001 or weight > 1000 then weight = 1 end
  return (named or not others) and tenant or '*', weight, store.number_of(open) or 0, store.number_of(pace) or 0,
    pools ~= '' and pools or nil
end

-- The pools that a tenant may use, with commas, if it may not use this one; otherwise nil.
function tenants.refused_pool(shard, tenant, pool)
  local _, _, _, _, pools = tenants.share_of(shard, tenant)
  for name in string.gmatch(pools or '', '[^,]+') do
    if name == pool then return nil end
  end
  return pools
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
