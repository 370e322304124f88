from cosmodrome.speed.due.pure import DueMessages as DueMessages
