import time; t=time.time()
from dblp.sim.lab.topology import *; from dblp.sim.lab.network import *; from dblp.sim.lab.preflight import *; from dblp.sim.lab.impairments import *
from tests.lab.datagrams import *
print("import", time.time()-t)
for f in preflight(): print(f.what, f.ok, f.found)
with LabNetwork(Topology(kind="star", hosts=3)) as net:
    print("built", time.time()-t, net.means)
    net.apply(parse_conditions("ge(p=0.01,r=0.3)"))
    t=time.time(); b=net.counters()
    lost=missing(net.hosts[0], net.hosts[1], 10000)
    print(lost.mean(), mean_run(lost), net.counters()-b, time.time()-t)
    net.apply(parse_conditions("loss(0.2),links(h2)"))
    b=net.counters()
    print(missing(net.hosts[0], net.hosts[2], 1000).mean(),missing(net.hosts[2], net.hosts[1], 1000).mean(),missing(net.hosts[0], net.hosts[1], 1000).mean())
    print(net.counters()-b)
    net.apply(parse_conditions("loss(0.1),delay(5ms),rate(1mbit,queue=8KB)"))
    b=net.counters()
    print(missing(net.hosts[0], net.hosts[1], 500).mean(), net.counters()-b)
