from cosmodrome.speed.client.pure import batch_body as batch_body
from cosmodrome.speed.client.pure import outline as outline
from cosmodrome.speed.client.pure import send_frame as send_frame
