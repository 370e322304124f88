from cosmodrome.speed.lane.pure import GetCounts as GetCounts
from cosmodrome.speed.lane.pure import Intake as Intake
from cosmodrome.speed.lane.pure import Plan as Plan
from cosmodrome.speed.lane.pure import PutCounts as PutCounts
from cosmodrome.speed.lane.pure import Template as Template
from cosmodrome.speed.lane.pure import Ticket as Ticket
from cosmodrome.speed.lane.pure import answer as answer
