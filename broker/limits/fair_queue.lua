-- The fair queue: orders waiting members of three classes and many tenants. Used for turns (log/lua/turns.lua), quotas
-- (governor.lua) and budgets (ledger.lua).
--
-- Keys are the caller's:  queue   zset  member -> place, the lowest is next
--                         shares  hash  tenant -> its next place, ':at' -> the latest place that was taken
-- Classes are '0' interactive, '1' normal, '2' batch; each has its own queue. The first class goes first, but every eighth
-- turn belongs to the last class and another eighth to the middle one, so that none starves.
-- Within a class a place is a virtual time, and a tenant's places are 1/weight apart (start-time fair queueing), so
-- tenants share by weight while they wait and owe nothing afterwards. Without tenants, a place is the time of arrival.
-- Holds: a member that steps back or returns keeps its old place; a new member gets no place before those already taken.

local store = require('store/prelude')
local fair_queue = {}

fair_queue.CLASSES = {'0', '1', '2'}
fair_queue.PATIENCE_MS = 3000  -- how long a grant is kept for a member after it was woken
fair_queue.MAX_WAKES = 3       -- how often a member is woken that does not respond
local ORDERS = {[0] = {'2', '1', '0'}, [4] = {'1', '0', '2'}}  -- by the number of the turn, modulo 8
local MAX_SCAN = 64            -- members of a queue that are considered at once; later ones wait behind them
local MAX_SHARES = 4096        -- tenants that a queue remembers; above that, it keeps half of them

-- The classes in their order at a turn, and whether it is one of the turns that prevent starvation.
function fair_queue.classes_at(turn)
  local order = ORDERS[turn % 8]
  return order or fair_queue.CLASSES, order ~= nil
end

-- Forget the debts of tenants in a queue that may never be empty, once there are many: invented names could fill the store.
-- Removes tenants whose place has been passed, which owe nothing, and of the others those that owe least.
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

-- The latest place that was taken, and the next place of a tenant, which may have been passed.
function fair_queue.places_of(shares, tenant)
  local found = redis.call('HMGET', shares, ':at', tenant)
  return store.number_of(found[1]) or 0, store.number_of(found[2]) or 0
end

-- Take the next place of a tenant, given both numbers of places_of. Returns the place.
function fair_queue.charge(shares, tenant, weight, at, next_place)
  local place = math.max(at, next_place)
  redis.call('HSET', shares, tenant, string.format('%.6f', place + 1 / weight))
  trim(shares, at)
  return string.format('%.6f', place)
end

-- The place of a new member without a tenant. It differs from the one before it; otherwise names would decide the order.
function fair_queue.place_at(queue, now)
  local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
  return last and math.max(now, tonumber(last) + 1) or now
end

function fair_queue.join(queue, member, place)
  redis.call('ZADD', queue, place, member)
end

-- The place of a member; nil if it does not wait.
function fair_queue.place_in(queue, member)
  return redis.call('ZSCORE', queue, member) or nil
end

-- The first waiting member, and its place.
function fair_queue.first(queue)
  local found = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  return found[1], found[2]
end

-- The waiting members in order, up to MAX_SCAN, and whether these are all.
function fair_queue.scan(queue)
  local waiting = redis.call('ZRANGE', queue, 0, MAX_SCAN - 1)
  return waiting, #waiting < MAX_SCAN
end

-- Record that a place was taken. A member that is granted again has an older one.
function fair_queue.advance(shares, place)
  local at = store.number_of(store.get(shares, ':at')) or 0
  if tonumber(place) > at then redis.call('HSET', shares, ':at', string.format('%.6f', place)) end
end

-- Remove a member that needs no turn any more, or whose place was recorded. Returns whether it was waiting.
function fair_queue.leave(queue, member)
  return redis.call('ZREM', queue, member) == 1
end

-- Forget the debts of tenants if no member waits. Returns whether that is so.
function fair_queue.forget_shares(queue, shares)
  if redis.call('EXISTS', queue) == 1 then return false end
  redis.call('DEL', shares)
  return true
end

return fair_queue
