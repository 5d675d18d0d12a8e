-- The fair queue: who is next where members of three classes and of many tenants wait. Used for turns
-- (log/lua/turns.lua), quotas (governor.lua) and budgets (ledger.lua).
--
-- Keys are the caller's:  queue   zset  member -> place, the lowest is next
--                         shares  hash  tenant -> its next place, ':at' -> the latest place that was taken
-- Classes are '0' interactive, '1' normal, '2' batch; each has its own queue. The first goes first, but each eighth turn
-- is the last one's and another eighth the middle one's, so none starves.
-- Within a class a place is a virtual time, and a tenant's places are 1/weight apart (start-time fair queueing), so
-- tenants share by weight while they wait and owe nothing afterwards. Where there are no tenants, a place is the time at
-- which a member came.
-- Holds: who steps back or returns keeps its old place; newcomers get none before those that were already taken.

local store = require('store/prelude')
local fair_queue = {}

fair_queue.CLASSES = {'0', '1', '2'}
fair_queue.PATIENCE_MS = 3000  -- how long what was granted to a member is kept for it after it was woken
fair_queue.MAX_WAKES = 3       -- how often a member is woken that does not come
local ORDERS = {[0] = {'2', '1', '0'}, [4] = {'1', '0', '2'}}  -- by the number of the turn, modulo 8
local MAX_SCAN = 64            -- how many of a queue are looked at: as many are served at once, later ones behind them
local MAX_SHARES = 4096        -- how many tenants a queue remembers; beyond that, half of them are enough

-- The classes in the order in which they go at a turn, and whether it is one of those that keep others from starving.
function fair_queue.classes_at(turn)
  local order = ORDERS[turn % 8]
  return order or fair_queue.CLASSES, order ~= nil
end

-- Forget what tenants owe in a queue that may never be empty, once there are many, or made-up names would fill the store:
-- those whose place has been passed owe nothing, and of the others those go that owe least.
local function trim(shares, at)
  if redis.call('HLEN', shares) <= MAX_SHARES then return end
  local flat, owing = redis.call('HGETALL', shares), {}
  for i = 1, #flat, 2 do
    if flat[i] ~= ':at' then owing[#owing + 1] = {flat[i], store.number_of(flat[i + 1]) or 0} end
  end
  table.sort(owing, function(a, b)
    if a[2] ~= b[2] then return a[2] > b[2] end
    return a[1] < b[1]
  end)
  for number, tenant in ipairs(owing) do
    if number > MAX_SHARES / 2 or tenant[2] <= at then redis.call('HDEL', shares, tenant[1]) end
  end
end

-- The latest place that was taken, and the next one of a tenant, which may have been passed.
function fair_queue.places_of(shares, tenant)
  local found = redis.call('HMGET', shares, ':at', tenant)
  return store.number_of(found[1]) or 0, store.number_of(found[2]) or 0
end

-- Let a tenant take its next place, given both numbers of places_of. Returns the place.
function fair_queue.charge(shares, tenant, weight, at, next_place)
  local place = math.max(at, next_place)
  redis.call('HSET', shares, tenant, string.format('%.6f', place + 1 / weight))
  trim(shares, at)
  return string.format('%.6f', place)
end

-- The place of a member that comes now, where there are no tenants; not that of the one before it, or their names would
-- decide who is first.
function fair_queue.place_at(queue, now)
  local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
  return last and math.max(now, tonumber(last) + 1) or now
end

function fair_queue.join(queue, member, place)
  redis.call('ZADD', queue, place, member)
end

-- The place of a member; nil: it does not wait.
function fair_queue.place_in(queue, member)
  return redis.call('ZSCORE', queue, member) or nil
end

-- The first of those who wait, and its place.
function fair_queue.first(queue)
  local found = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  return found[1], found[2]
end

-- Those who wait, in order, as many as are looked at, and whether these are all.
function fair_queue.scan(queue)
  local waiting = redis.call('ZRANGE', queue, 0, MAX_SCAN - 1)
  return waiting, #waiting < MAX_SCAN
end

-- Note that a place was taken. A member that is granted again has an old one.
function fair_queue.advance(shares, place)
  local at = store.number_of(store.get(shares, ':at')) or 0
  if tonumber(place) > at then redis.call('HSET', shares, ':at', string.format('%.6f', place)) end
end

-- Take a member out whose turn will not come, or whose place was noted. Returns whether it waited.
function fair_queue.leave(queue, member)
  return redis.call('ZREM', queue, member) == 1
end

-- Forget what tenants owe if nobody waits. Returns whether that is so.
function fair_queue.forget_shares(queue, shares)
  if redis.call('EXISTS', queue) == 1 then return false end
  redis.call('DEL', shares)
  return true
end

return fair_queue
