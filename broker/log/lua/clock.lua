-- The shard's clock: kept by the beats of workers, whose monotonic clocks cannot jump.
-- Keys:  shard base  :clock  hash  see store.times_ms   :worker:<id>:about  hash  monotonic, lead, ttl_ms

local store = require('store/prelude')
local clock = {}

local USUAL_TTL_MS = 1700       -- time to live of a heartbeat while the store is fast
clock.CLOCKS_DIFFER_MS = 600000  -- tolerated difference between the clocks of two machines

-- Do not count time in which no worker could beat, because the store was unavailable or its clock jumped.
local function extend_deadlines(shard, passed)
  for _, key in ipairs({shard .. ':workers', shard .. ':nodes'}) do
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, 1, '+inf')) do
      redis.call('ZADD', key, tonumber(redis.call('ZSCORE', key, name)) + passed, name)
    end
  end
end

-- Update the shard's time at a beat. If a worker's monotonic clock, which cannot jump, and the server's clock disagree about
-- the gap between two beats, the worker's is right. Its value may be old when it arrives: `lead`, the difference between the
-- shard's time and it, is the smallest one seen. It grows slowly, so that clock drift does not add up.
-- monotonic: the worker's clock in ms; nil if there is none.  is_believed: then trust the server's clock, but never go back.
function clock.keep_time(shard, worker, ttl, monotonic, is_believed)
  local about, wall = shard .. ':worker:' .. worker .. ':about', store.wall_ms()
  local said = store.number_of(store.get(about, 'ttl_ms')) or USUAL_TTL_MS
  local kept, mine = redis.call('HMGET', shard .. ':clock', 'wall', 'now'), {}
  if monotonic then mine = redis.call('HMGET', about, 'monotonic', 'lead') end
  local seen, least, now = store.number_of(mine[1]), store.number_of(mine[2]), wall
  if not seen then least = nil end
  local crept = least and least + (monotonic - seen) / 10
  local beat, before = store.number_of(kept[1]), store.number_of(kept[2])
  if not beat and redis.call('EXISTS', shard .. ':hooked') == 1 then
    redis.call('HSET', shard .. ':clock', 'hooked', '1')  -- the previous hash was lost, or moved away
  end
  if beat and before then
    local step = wall - beat
    local is_gap = step < 0 or step > store.BEAT_GAP_MS
    now = before + step
    if least then
      if is_gap or now < monotonic + crept - store.BEAT_GAP_MS then now = monotonic + least end
    elseif is_gap and not is_believed then
      now = before
    end
    now = math.max(now, before)
    -- After a jump, the time returns to the server's clock by a twentieth of the time that passes.
    local most = math.min(now - before, store.BEAT_GAP_MS) / 20
    now = now + math.max(-most, math.min(most, wall - now))
    -- By the worker's previous ttl: its latest one may be longer, because the store has become slow for all.
    if now - before > math.min(ttl, said) / 2 then extend_deadlines(shard, math.floor(now - before)) end
  end
  if monotonic then
    local lead = math.min(now - monotonic, crept or math.huge)
    redis.call('HSET', about, 'monotonic', monotonic, 'lead', string.format('%.3f', lead))
  end
  redis.call('HSET', shard .. ':clock', 'wall', wall, 'now', string.format('%.3f', now))
  return math.floor(now)
end

-- now: return the shard's time.  KEYS shard base.  returns {'now', ms}
local function now(keys)
  return {'now', store.now_ms(keys[1])}
end

redis.register_function('deck_now', now)

return clock
