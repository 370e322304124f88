from cosmodrome.speed.arrow.pure import ColumnBuilder as ColumnBuilder
