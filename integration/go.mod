module culvert.dev/integration

go 1.26.0

replace culvert.dev => ../
