-- Webhooks: their unread events, and their waiting deliveries. All keys but `hooked` and `news` are in the first shard:
-- Keys:  :hooked                hash  tenant, or '*' -> 1: it has webhooks
--        :news                  zset  conversation -> the first event that webhooks were not notified of
--        :webhooks              hash  webhook -> its definition (JSON)
--        :webhooks:due          zset  '<webhook> <conversation>', a line of deliveries -> when its first one is due (ms)
--        :webhook:<id>:sent     hash  delivery -> its definition and status (JSON)
--        :webhook:<id>:order    zset  delivery -> when it was planned (ms)
--        :webhook:<id>:ended    zset  delivery -> when it ended (ms)
--        :webhook:<id>:line:<conversation>  zset  delivery -> its place
-- A worker holds a line by the exact time at which the line is due again; another time means that another worker has it.

local store = require('store/prelude')
local webhooks = {}

-- told: record that webhooks were notified of the events of a conversation up to an id.
-- KEYS conversation base, shard base.  ARGV cid, the first event that they were not notified of, the last one now
-- returns {'told'} {'other'}: it has changed meanwhile
local function told(keys, args)
  local news, cid = keys[2] .. ':news', args[1]
  local first = redis.call('ZSCORE', news, cid)
  if not first or tonumber(first) ~= tonumber(args[2]) then return {'other'} end
  local last = tonumber(store.get(keys[1] .. ':meta', 'last_id'))
  if not last or last <= tonumber(args[3]) then redis.call('ZREM', news, cid)
  else redis.call('ZADD', news, tonumber(args[3]) + 1, cid) end
  return {'told'}
end

-- put_webhook: create, change or remove a webhook, with all its deliveries.
-- KEYS shard base.  ARGV id, its expected text or '', its new text or '' to remove it, maximum number of webhooks
-- returns {'put'} {'other'}: it has another text  {'full'}
local function put_webhook(keys, args)
  local root, id, known, text = keys[1] .. ':webhooks', args[1], args[2], args[3]
  local there = store.get(root, id) or ''
  if there ~= known and there ~= text then return {'other'} end  -- not if it is repeated after a lost reply
  if text == '' then
    redis.call('HDEL', root, id)
    local own = keys[1] .. ':webhook:' .. id
    redis.call('UNLINK', own .. ':sent', own .. ':order', own .. ':ended')
  else
    if there == '' and redis.call('HLEN', root) >= tonumber(args[4]) then return {'full'} end
    redis.call('HSET', root, id, text)
  end
  return {'put'}
end

-- plan_delivery: add a delivery to the end of a line, once.
-- KEYS shard base.  ARGV webhook, cid, delivery, its place, its text, maximum number of waiting deliveries
-- returns {'planned'} {'known'} {'full'} {'missing'}: the webhook was removed
local function plan_delivery(keys, args)
  local shard, hook, cid, delivery = keys[1], args[1], args[2], args[3]
  local own, now = shard .. ':webhook:' .. hook, store.now_ms(shard)
  if not store.get(shard .. ':webhooks', hook) then return {'missing'} end
  if store.get(own .. ':sent', delivery) then return {'known'} end
  if redis.call('HLEN', own .. ':sent') - redis.call('ZCARD', own .. ':ended') >= tonumber(args[6]) then return {'full'} end
  redis.call('HSET', own .. ':sent', delivery, args[5])
  redis.call('ZADD', own .. ':order', now, delivery)
  redis.call('ZADD', own .. ':line:' .. cid, args[4], delivery)
  local line = hook .. ' ' .. cid
  if not redis.call('ZSCORE', shard .. ':webhooks:due', line) then
    redis.call('ZADD', shard .. ':webhooks:due', now, line)
  end
  return {'planned'}
end

-- send_due: lease the due lines for delivery within a time.
-- KEYS shard base.  ARGV maximum number of lines, lease in ms.  returns {'due', line, when it is due again, line ...}
local function send_due(keys, args)
  local due, now = keys[1] .. ':webhooks:due', store.now_ms(keys[1])
  local found = {'due'}
  for _, line in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, args[1])) do
    local again = string.format('%.0f', now + tonumber(args[2]))
    redis.call('ZADD', due, again, line)
    found[#found + 1] = line
    found[#found + 1] = again
  end
  return found
end

-- take_delivery: return the first delivery of a line.
-- KEYS shard base.  ARGV webhook, cid, when the line is due as the caller knows it, lease in ms
-- returns {'taken', delivery, text, when it is due again} {'other'}: another worker has the line  {'empty'}
local function take_delivery(keys, args)
  local shard, hook, cid = keys[1], args[1], args[2]
  local due, own, line = shard .. ':webhooks:due', shard .. ':webhook:' .. hook, hook .. ' ' .. cid
  local score = redis.call('ZSCORE', due, line)
  if not score or tonumber(score) ~= tonumber(args[3]) then return {'other'} end
  local waiting = own .. ':line:' .. cid
  while true do
    local first = redis.call('ZRANGE', waiting, 0, 0)[1]
    if not first then
      redis.call('ZREM', due, line)
      return {'empty'}
    end
    local text = store.get(own .. ':sent', first)
    if text then
      local again = string.format('%.0f', math.max(store.now_ms(shard), tonumber(score)) + tonumber(args[4]))
      redis.call('ZADD', due, again, line)
      return {'taken', first, text, again}
    end
    redis.call('ZREM', waiting, first)  -- its webhook was removed
  end
end

-- end_attempt: record the outcome of an attempt, unless another worker has the line now.
-- KEYS shard base.  ARGV webhook, cid, delivery, when the line is due as the caller knows it, its text, ms until the next
--      attempt or '' if it has ended, number of ended deliveries to keep
-- returns {'ended', when the line is due} {'other'}
local function end_attempt(keys, args)
  local shard, hook, cid, delivery = keys[1], args[1], args[2], args[3]
  local due, own, line = shard .. ':webhooks:due', shard .. ':webhook:' .. hook, hook .. ' ' .. cid
  local score = redis.call('ZSCORE', due, line)
  if not score or tonumber(score) ~= tonumber(args[4]) then return {'other'} end
  local now = store.now_ms(shard)
  local again = string.format('%.0f', now + (tonumber(args[6]) or 0))
  redis.call('ZADD', due, again, line)
  if not store.get(own .. ':sent', delivery) then return {'ended', again} end  -- its webhook was removed
  redis.call('HSET', own .. ':sent', delivery, args[5])
  if args[6] ~= '' then return {'ended', again} end
  redis.call('ZREM', own .. ':line:' .. cid, delivery)
  redis.call('ZADD', own .. ':ended', now, delivery)
  local more = redis.call('ZCARD', own .. ':ended') - tonumber(args[7])
  if more > 0 then
    for _, old in ipairs(redis.call('ZRANGE', own .. ':ended', 0, more - 1)) do
      redis.call('ZREM', own .. ':ended', old)
      redis.call('ZREM', own .. ':order', old)
      redis.call('HDEL', own .. ':sent', old)
    end
  end
  return {'ended', again}
end

-- redeliver: queue a delivery again, at once, whether it has ended or not.
-- KEYS shard base.  ARGV webhook, cid, delivery, its place, its expected text, its new text
-- returns {'planned'} {'other'}: it has another text
local function redeliver(keys, args)
  local shard, hook, cid, delivery = keys[1], args[1], args[2], args[3]
  local own = shard .. ':webhook:' .. hook
  if store.get(own .. ':sent', delivery) ~= args[5] then return {'other'} end
  redis.call('HSET', own .. ':sent', delivery, args[6])
  redis.call('ZREM', own .. ':ended', delivery)
  redis.call('ZADD', own .. ':line:' .. cid, args[4], delivery)
  redis.call('ZADD', shard .. ':webhooks:due', store.now_ms(shard), hook .. ' ' .. cid)
  return {'planned'}
end

-- Record the first event of a conversation that webhooks were not notified of, if its tenant has any, see told.
function webhooks.add_news(shard, cid, tenant, first)
  if not store.is_there(shard, shard .. ':hooked', 'hash') then return end
  local its, everybodys = unpack(redis.call('HMGET', shard .. ':hooked', tenant or '', '*'))
  if not its and not everybodys then return end
  store.is_there(shard, shard .. ':news', 'zset')
  local known = redis.call('ZSCORE', shard .. ':news', cid)
  if not known or tonumber(known) > first then redis.call('ZADD', shard .. ':news', first, cid) end
end

redis.register_function('deck_told', told)
redis.register_function('deck_put_webhook', put_webhook)
redis.register_function('deck_plan_delivery', plan_delivery)
redis.register_function('deck_send_due', send_due)
redis.register_function('deck_take_delivery', take_delivery)
redis.register_function('deck_end_attempt', end_attempt)
redis.register_function('deck_redeliver', redeliver)

return webhooks
