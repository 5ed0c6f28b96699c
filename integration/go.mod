module culvert.dev/integration

go 1.26.0

require (
	culvert.dev v0.0.0
	go.uber.org/goleak v1.3.0
)

replace culvert.dev => ../
