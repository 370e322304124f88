from cosmodrome.speed.arrow_pure import ColumnBuilder as ColumnBuilder
