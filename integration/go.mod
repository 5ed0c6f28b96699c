module culvert.dev/integration

go 1.26.0

require culvert.dev v0.0.0

require go.uber.org/goleak v1.3.0 // indirect

replace culvert.dev => ../
