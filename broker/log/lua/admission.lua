-- Admission: decides whether a conversation may start now.
-- Keys:  shard base  :open:<tenant>   zset  unsettled conversations -> created (ms)
--                    :paces           hash  tenant -> when its allowance for a minute is full again (ms)
--                    :tenants         hash  see tenants.lua; ':memory' -> bound of the server's memory: up to 1 a share of
--                                           maxmemory, above 1 bytes, 0 no bound
--                    :refused         hash  'memory', 'open', 'pace' -> number of refused starts
-- Only starts are refused. Messages, observations, steps and delegates are admitted until the server is full, so the
-- memory above the bound is reserved for them.

local store = require('store/prelude')
local tenants = require('log/lua/tenants')
local admission = {}

local USUAL_MEMORY = 0.8
local OPEN_RETRY_MS, MEMORY_RETRY_MS, MINUTE_MS = 5000, 15000, 60000
local LOOKED_AT = 64

-- The states in which a conversation needs no worker until the next message; see broker/contract/agent_state.py.
local SETTLED = {finished = true, rejected = true, error = true, stopped = true, awaiting_user_input = true,
  awaiting_user_confirmation = true, paused = true}

function admission.is_settled(state) return SETTLED[state] or false end

local function open_key(shard, name) return shard .. ':open:' .. name end

-- Add a conversation to the open ones of its tenant, or remove it.
function admission.count_open(shard, name, cid, state, created)
  local key = open_key(shard, name)
  if not store.is_there(shard, key, 'zset') and SETTLED[state] then return end
  if SETTLED[state] then redis.call('ZREM', key, cid)
  else redis.call('ZADD', key, created, cid) end
end

local function is_open(meta)
  local last, closed, state = unpack(redis.call('HMGET', meta, 'last_id', 'closed', 'state'))
  return last and not closed and not SETTLED[state]
end

-- The number of open conversations of a tenant. Before a refusal, check the oldest ones and remove those that were lost or
-- closed.
local function open_of(shard, name, most)
  local key = open_key(shard, name)
  if not store.is_there(shard, key, 'zset') then return 0 end
  local count = redis.call('ZCARD', key)
  if count < most then return count end
  for _, cid in ipairs(redis.call('ZRANGE', key, 0, LOOKED_AT - 1)) do
    if not store.attempt(shard, key, cid, is_open, shard .. ':c:' .. cid .. ':meta') then redis.call('ZREM', key, cid) end
  end
  return redis.call('ZCARD', key)
end

-- The refusal for the store's memory; nil if there is room, or if the server does not report its memory.
local function memory_refusal(shard)
  local bound = store.number_of(store.get(shard .. ':tenants', ':memory')) or USUAL_MEMORY
  if bound <= 0 then return nil end
  local text = redis.pcall('INFO', 'memory')
  if type(text) ~= 'string' then return nil end
  local used = tonumber(string.match(text, 'used_memory:(%d+)'))
  local most = tonumber(string.match(text, '[\r\n]maxmemory:(%d+)')) or 0
  if bound > 1 then most = bound else most = math.floor(most * bound) end
  if not used or most <= 0 or used < most then return nil end
  return {'refused', 'memory', '', used, most, MEMORY_RETRY_MS}
end

-- Count a refusal. A failure to count does not change it.
local function counted(shard, refusal)
  redis.pcall('HINCRBY', shard .. ':refused', refusal[2], 1)
  return refusal
end

-- How many ms to wait until the pace of a tenant allows one more start, and when its allowance is full again after that.
local function pace_of(shard, name, most, now)
  local step = MINUTE_MS / most
  local whole = math.max(store.number_of(store.get(shard .. ':paces', name)) or 0, now) + step
  return math.max(0, whole - now - MINUTE_MS), whole
end

-- Decide whether a conversation of a tenant may start. Returns the refusal; or nil and what to record once it has started.
-- elsewhere: number of the tenant's open conversations in other shards
function admission.decide(shard, tenant, elsewhere, now)
  local name, _, most, pace = tenants.share_of(shard, tenant)
  local refusal, whole = memory_refusal(shard), nil
  if refusal then return counted(shard, refusal) end
  if most > 0 then
    local count = open_of(shard, name, most - elsewhere) + elsewhere
    if count >= most then return counted(shard, {'refused', 'open', name, count, most, OPEN_RETRY_MS}) end
  end
  if pace > 0 then
    local wait
    wait, whole = pace_of(shard, name, pace, now)
    if wait > 0 then return counted(shard, {'refused', 'pace', name, math.ceil(pace), math.ceil(pace), math.ceil(wait)}) end
  end
  return nil, name, whole
end

-- admit: check whether a conversation may start now, for callers that must store something before. Writes nothing.
-- KEYS shard base.  ARGV cid, tenant, number of its open conversations in other shards
-- returns {'admitted'} {'refused', …} as append does; a started conversation is admitted
local function admit(keys, args)
  local shard = keys[1]
  if store.get(shard .. ':c:' .. args[1] .. ':meta', 'last_id') then return {'admitted'} end
  return admission.decide(shard, args[2], tonumber(args[3]) or 0, store.now_ms(shard)) or {'admitted'}
end

redis.register_function('deck_admit', admit)

return admission
