import asyncio, time
from federation.messages import *
from tests.consortium import soon

def test_job(running, site, consortium, job_text):
    async def story():
        async with running() as hub:
            op = consortium.member("op", Role.OPERATOR)
            a, b, c = site("a"), site("b"), site("c")
            async with hub.attending(a, b, c):
                job = await hub.submit(op, job_text(rounds=3))
                await a.until(JobEnded)
                print(a.heard[-1])
                async with hub.opened(op) as line:
                    print((await line.operate(ShowJob(job))).history)
    t=time.process_time(); w=time.time()
    asyncio.run(story())
    print(time.process_time()-t, time.time()-w)
