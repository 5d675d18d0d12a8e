-- The replicas of one model: engines at several addresses, each a key of the model's pool (governor.lua).
--
-- Keys, of the pool's base:  :warm:<key>      zset  conversation -> its last use, of those whose prompt the engine keeps
--                            :sizes:<key>     hash  conversation -> '<tokens of its prompt and reply> <tenant>'
--                            :prefixes:<key>  zset  hash of a first prompt -> its last use
--                            :served          hash  tenant -> its turns by its weight, ':most' -> the most of any tenant
-- A conversation is resident at the engine that keeps its prompt. Its next call goes there, before the calls of others.
-- One that is resident nowhere is admitted while the prompts of all residents fit the engine's cache. Otherwise each turn
-- would push out the prompt of another conversation, and every prompt would be computed again.
-- An engine without a stated concurrency has a window: it grows while the engine is fast, and shrinks with refusals.
-- Holds: a tenant waits for at most OWED turns of others at the engines. Then residents of others give way.

local store = require('store/prelude')
local replicas = {}

replicas.OWED = 2              -- turns that a tenant may be behind before residents of other tenants give way
replicas.WARM_MS = 300000      -- how long an engine is expected to keep a prompt that is not used
local PREFIX_MS = 600000
local LEAST_IDLE_MS, IDLE_CALLS = 5000, 8  -- a resident that is idle for so long, or so many calls, gives way
local FIRST_WINDOW, MOST_WINDOW = 8, 1024
local SLOW, TOO_SLOW = 3, 6    -- times the best pace: the window stops growing, and shrinks
local USED = 0.75             -- a window grows while so much of it is used
local UNTIL_NEXT_REPORT_MS = 8000
local SEEN_MS = 15000          -- how long what an engine reported of itself counts
local FULL_USE = 0.95
local FILLED = 0.85           -- the part of a cache that new conversations may fill
local MAX_EVICTED = 64
local PREFIX_WORTH = 0.25       -- how much fuller the cache may be of an engine that has seen the prompt of a group
local COLD_WAIT_MS = 500
local MAX_SERVED = 4096
local FIRST_REST_MS, LONGEST_REST_MS = 1000, 30000  -- of an engine that does not answer, doubled each time

local function warm(pool, key) return pool.base .. ':warm:' .. key.name end
local function sizes(pool, key) return pool.base .. ':sizes:' .. key.name end
local function prefixes(pool, key) return pool.base .. ':prefixes:' .. key.name end

-- The most calls in flight at a key; nil: any number.
function replicas.slots_of(key)
  if key.limits.concurrency then return math.max(1, math.floor(key.limits.concurrency * key.level.factor)) end
  if not key.limits.replica then return nil end
  return math.max(1, math.floor(key.level.window or FIRST_WINDOW))
end

-- The replica where a conversation is resident; nil if there is none.
function replicas.home_of(pool, cid)
  for _, key in ipairs(pool.keys) do
    local used = redis.call('ZSCORE', warm(pool, key), cid)
    if used and pool.now - tonumber(used) < replicas.WARM_MS then return key end
  end
  return nil
end

local function size_of(pool, key, cid)
  local size, tenant = string.match(store.get(sizes(pool, key), cid) or '', '^(%d+) (.*)$')
  return store.number_of(size) or 0, tenant
end

-- Forget that a conversation is resident.
function replicas.leave(pool, cid)
  for _, key in ipairs(pool.keys) do
    if redis.call('ZREM', warm(pool, key), cid) == 1 then
      key.level.cached = math.max(0, (key.level.cached or 0) - size_of(pool, key, cid))
      redis.call('HDEL', sizes(pool, key), cid)
    end
  end
end

-- Make a conversation resident at a replica, with the tokens of its prompt. Without a tenant, it keeps its own. If prompts
-- have grown beyond the cache, the least recently used residents give way, as their blocks do.
function replicas.stay(pool, key, cid, tokens, tenant)
  local _, before = size_of(pool, key, cid)
  replicas.leave(pool, cid)
  redis.call('ZADD', warm(pool, key), pool.now, cid)
  redis.call('HSET', sizes(pool, key), cid, string.format('%.0f', tokens) .. ' ' .. (tenant or before or ''))
  key.level.cached = (key.level.cached or 0) + tokens
  local most = key.limits.cache or key.level.cache
  if not most or key.level.cached <= most then return end
  for _, other in ipairs(redis.call('ZRANGE', warm(pool, key), 0, MAX_EVICTED - 1)) do
    if other ~= cid and redis.call('HEXISTS', pool.base .. ':held', other) == 0 then replicas.leave(pool, other) end
    if key.level.cached <= most then return end
  end
end

local function served(pool) return pool.base .. ':served' end

-- Count a turn of a tenant. A new tenant, or one that was away, is owed at most OWED turns.
function replicas.serve(pool, waiter)
  local most = store.number_of(store.get(served(pool), ':most')) or 0
  local before = store.number_of(store.get(served(pool), waiter.tenant)) or most
  local now = math.max(before, most - 2 * replicas.OWED) + 1 / waiter.weight
  if redis.call('HLEN', served(pool)) > MAX_SERVED then redis.call('DEL', served(pool)) end
  redis.call('HSET', served(pool), waiter.tenant, string.format('%.6f', now),
    ':most', string.format('%.6f', math.max(most, now)))
end

function replicas.is_owed(pool, tenant)
  local found = redis.call('HMGET', served(pool), ':most', tenant)
  local most, own = store.number_of(found[1]), store.number_of(found[2])
  if not most then return false end
  if not own then  -- its first wait
    redis.call('HSET', served(pool), tenant, string.format('%.6f', most))
    return false
  end
  return most - own > replicas.OWED
end

function replicas.note_prefix(pool, key, prefix)
  if prefix ~= '' then redis.call('ZADD', prefixes(pool, key), pool.now, prefix) end
end

-- Make room for so many tokens. Residents that are idle give way, the least recently used first; for a tenant that is owed
-- a turn, also residents of tenants with more turns. Returns whether there is room.
local function make_room(pool, key, tokens, owed)
  local level = key.level
  if not owed and (level.use or 0) >= FULL_USE and pool.now - (level.seen or 0) < SEEN_MS then return false end
  local most = key.limits.cache or level.cache
  if not most then return true end
  local lacking = (level.cached or 0) + tokens - FILLED * most  -- residents grow
  if lacking <= 0 or redis.call('EXISTS', warm(pool, key)) == 0 then return true end
  local idle_since = pool.now - math.max(LEAST_IDLE_MS, IDLE_CALLS * level.took)
  local turns = owed and store.number_of(store.get(served(pool), owed)) or 0
  local going, found = {}, 0
  local rows = redis.call('ZRANGE', warm(pool, key), 0, MAX_EVICTED - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local is_idle = tonumber(rows[i + 1]) < idle_since
    if found >= lacking or not (owed or is_idle) then break end
    local size, tenant = size_of(pool, key, rows[i])
    local gives_way = is_idle or (store.number_of(store.get(served(pool), tenant or '')) or 0) > turns
    if gives_way and redis.call('HEXISTS', pool.base .. ':held', rows[i]) == 0 then
      going[#going + 1] = rows[i]
      found = found + size
    end
  end
  if found < lacking then return false end
  for _, cid in ipairs(going) do replicas.leave(pool, cid) end
  return true
end

-- Choose the replica of a call. Returns it; or nil, the wait in ms, and who has to wait: 'it' alone, 'cold' for all that are
-- not resident, 'all'.
-- wait_of(key): the ms until a key can serve the call
-- is_owed: its tenant is behind, so that residents give way to it
function replicas.choose(pool, cid, waiter, wait_of, is_owed)
  local home, least, free = replicas.home_of(pool, cid), nil, {}
  for _, key in ipairs(pool.keys) do
    local wait = wait_of(key)
    if wait == 0 and key == home then return key end
    if not least or wait < least then least = wait end
    if wait == 0 then
      local has_prefix = waiter.prefix ~= '' and redis.call('ZSCORE', prefixes(pool, key), waiter.prefix)
      local most = key.limits.cache or key.level.cache
      local load = key.level.in_flight / (replicas.slots_of(key) or 1e3)
      if most then load = math.max(load, (key.level.cached or 0) / most) end
      free[#free + 1] = {key = key, rank = load - (has_prefix and PREFIX_WORTH or 0)}
    end
  end
  if #free == 0 then return nil, least, 'all' end
  if home and (home.level.down or 0) <= pool.now then return nil, wait_of(home), 'it' end
  table.sort(free, function(a, b) return a.rank < b.rank end)
  local tokens = waiter.wanted.input + waiter.wanted.output
  for _, owed in ipairs(is_owed and {false, waiter.tenant} or {false}) do
    for _, one in ipairs(free) do
      if make_room(pool, one.key, tokens, owed) then return one.key end
    end
  end
  return nil, COLD_WAIT_MS, 'cold'
end

-- Adjust the window of a replica after a reply. A call that waits in the engine has a slower pace than those before it.
function replicas.learn(key, took_ms, output)
  local level = key.level
  if took_ms <= 0 or output <= 0 then return end
  local pace = took_ms / output
  level.pace = (level.pace or pace) + (pace - (level.pace or pace)) / 8
  level.best = math.min((level.best or level.pace) * 1.001, level.pace)
  local window = level.window or FIRST_WINDOW
  if level.pace > TOO_SLOW * level.best then
    window = math.max(1, window - 1 / window)
  elseif level.in_flight + 1 >= USED * math.floor(window) and level.pace <= SLOW * level.best then
    window = math.min(MOST_WINDOW, window + (level.refused and 1 / window or 0.5))
  end
  level.window, level.rest = window, 0
end

-- Shrink the window after a wave of refusals: of calls that were in flight together, the first one.
function replicas.shrink(pool, key)
  key.level.window = math.max(1, (key.level.window or FIRST_WINDOW) * 0.8)
  key.level.refused, key.level.shrunk = 1, pool.now
end

-- Let an engine rest that does not answer. What it kept is lost.
function replicas.set_down(pool, key)
  local level = key.level
  if (level.down or 0) > pool.now then return end  -- of a call that was in flight together with the first one
  level.rest = math.min(LONGEST_REST_MS, math.max(FIRST_REST_MS, 2 * (level.rest or 0)))
  level.down = pool.now + level.rest
  redis.call('DEL', warm(pool, key), sizes(pool, key), prefixes(pool, key))
  level.cached = 0
end

-- Record the report of an engine: the tokens that its cache holds and the used part of it, as texts that may be empty.
function replicas.note_report(pool, key, is_up, cache, use)
  local level = key.level
  if not is_up then
    replicas.set_down(pool, key)
    level.down = math.max(level.down, pool.now + UNTIL_NEXT_REPORT_MS)
    return
  end
  level.down, level.rest, level.seen = 0, 0, pool.now
  if store.number_of(cache) then level.cache = store.number_of(cache) end
  level.use = store.number_of(use) or 0
end

-- Whether a worker should ask an engine for its report: one does, each so many ms.
function replicas.claim_report(pool, key, every_ms)
  if pool.now - (key.level.asked or 0) < every_ms then return false end
  key.level.asked = pool.now
  return true
end

-- Drop what is too old, and count the tokens of the residents.
function replicas.sweep(pool)
  for _, key in ipairs(pool.keys) do
    for _, cid in ipairs(redis.call('ZRANGEBYSCORE', warm(pool, key), '-inf', pool.now - replicas.WARM_MS)) do
      redis.call('ZREM', warm(pool, key), cid)
      redis.call('HDEL', sizes(pool, key), cid)
    end
    redis.call('ZREMRANGEBYSCORE', prefixes(pool, key), '-inf', pool.now - PREFIX_MS)
    local total = 0
    for cid in pairs(store.pairs_of(redis.call('HGETALL', sizes(pool, key)))) do
      if redis.call('ZSCORE', warm(pool, key), cid) then
        total = total + size_of(pool, key, cid)
      else
        redis.call('HDEL', sizes(pool, key), cid)
      end
    end
    key.level.cached = total
  end
end

return replicas
